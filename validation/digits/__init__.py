"""Count the right digits of attention: on hard inputs, at real sizes, and in pairs."""
