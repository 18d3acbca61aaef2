"""What the project asks of the operating system."""
