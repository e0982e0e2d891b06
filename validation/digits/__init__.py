"""How many digits of attention are right: on hard inputs, at real sizes, and in pairs."""
