"""One module or package a framework; each is imported only by its user."""
