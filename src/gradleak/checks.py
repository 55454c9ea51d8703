def checks_of(r): return None
