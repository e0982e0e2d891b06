"""How many digits of softmax attention are right: the worst inputs, and what libraries get there."""
