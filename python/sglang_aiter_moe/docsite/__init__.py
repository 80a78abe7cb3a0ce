"""Pages and pictures of docs/ that are made from the code, and the commands that docs/ shows."""
