"""One module for each claim; its name is the name of the claim."""
