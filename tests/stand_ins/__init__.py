"""Small distributions that stand in for libraries that we do not install."""
