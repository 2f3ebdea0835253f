"""Many machines: scoring on Ray Serve, online, and on Ray Data, offline. Needs the extra `ray`."""
