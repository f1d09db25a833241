"""What keeps statistics private: clipping, noise, masking."""
