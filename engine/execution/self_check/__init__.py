"""The self-check at load: the packed model must give what its own library gives, on random sequences."""
