"""Sessions: what agents sampled, turn by turn, with exact token ids."""
