"""Who owns which page: scopes, fingerprints, the page pool, the prefix index and the manager over them."""
