"""What a policy means for bytes and buffers: who lives where, how much room work takes."""
