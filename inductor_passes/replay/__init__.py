"""Carrying a plan through Inductor: fused scheduler nodes -> Problem -> plan -> order of the generated code."""
