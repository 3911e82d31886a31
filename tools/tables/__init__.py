"""Tables of published pages and of what checks find: each module makes one."""
