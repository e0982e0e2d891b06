"""How many digits of softmax attention are right, on the worst inputs that were found."""
