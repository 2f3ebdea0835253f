"""Several models behind one server: how they are configured, which of them a request goes to, and what the
rest of the server sees of them."""
