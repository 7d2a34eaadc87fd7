"""What a run decides with numbers: profiles and budgets -> Plan -> Schedule. No torch, no files, no clock."""
