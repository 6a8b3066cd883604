"""What a schedule will do: costs in, a timeline, its memory and the papers' formulas out."""
