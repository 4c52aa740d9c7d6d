"""Who runs next, and the one door to the device."""
