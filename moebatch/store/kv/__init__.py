"""Keys and values of all sequences: pages, levels, and the ways between them."""
