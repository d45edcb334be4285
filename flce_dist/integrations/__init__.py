"""One file a framework; each is imported only by its user."""
