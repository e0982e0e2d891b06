"""What is wrong in public implementations: every statement is made by running them."""
