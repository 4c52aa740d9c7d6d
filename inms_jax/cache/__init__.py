"""The pages themselves, on the device: page pool arrays, page tables and the scatters that write them."""
