"""The mesh in virtual time: real decisions and the real plan runner over modelled nodes and links. Model comparisons,
no measurements of any product."""
