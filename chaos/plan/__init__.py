"""Plans: their values, how they are drawn and made smaller, when each fault is due."""
