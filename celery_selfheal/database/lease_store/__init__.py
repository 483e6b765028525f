"""Tables and functions of the lease store in PostgreSQL, as revision 1.2 creates them.

A file that was released is never edited: a later revision brings its own, with ``CREATE OR REPLACE``.
"""
