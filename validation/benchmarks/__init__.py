"""Time and memory against peers, the roofline, the length and the number of samples."""
