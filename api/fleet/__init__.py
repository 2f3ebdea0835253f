"""One server of several processes: fronts take requests and spread them over engines."""
