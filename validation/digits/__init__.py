"""How many digits implementations have, and what is proven of those in pairs."""
