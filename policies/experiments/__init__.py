"""Policies that the runtime makes room for, and that the papers which Runahead is built from do not ask for.

They need storage or marks of their own, where a policy of the folder above returns indices alone. They are chosen by
name as any other. A file here may import all of the library, and nothing imports it; it says what was found about the
method, and why it is here.
"""
