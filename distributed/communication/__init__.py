"""How ranks find each other, and how objects and tensors travel between them."""
