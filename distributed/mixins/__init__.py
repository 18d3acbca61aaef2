"""What a backend or the loop is put together from."""
