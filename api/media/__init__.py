"""Where pictures may come from beside requests' own bodies: named hosts, and files in a folder. By default
from nowhere."""
