"""The scripts that the command line trains when no script is given."""
