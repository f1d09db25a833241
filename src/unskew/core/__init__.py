"""What all other packages use; imports nothing else of ours."""
