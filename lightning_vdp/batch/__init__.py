"""What a forward is given: fetched together, compared within a group, checked, and known on the host."""
