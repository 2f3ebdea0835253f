"""The check at load: does the packed model give what the plain one gives, on random sequences?"""
