"""What everything else stands on; imports nothing else of ours."""
