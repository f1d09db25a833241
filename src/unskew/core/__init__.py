"""What all other packages use; it imports none of them."""
