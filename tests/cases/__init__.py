"""What users of other engines ran into, as behaviours of this one; docs/cases.md names the test of each."""
