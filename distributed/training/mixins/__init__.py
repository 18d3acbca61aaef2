"""Four abilities that a backend or a loop adds to itself, each by holding one part."""
