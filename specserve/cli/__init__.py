"""The commands. `main` has the table of them; each is a thin file that prints what a room below has done, and is
imported only when it runs (`lazy`)."""
