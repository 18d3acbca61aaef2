"""What a search over hyperparameters is made of, whatever runs its trials."""
