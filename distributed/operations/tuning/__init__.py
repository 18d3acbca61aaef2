"""Search for hyperparameters, whatever engine runs the trials."""
