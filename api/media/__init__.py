"""Where pictures may come from beside requests' own bodies: named hosts, and files in a folder. By default
from nowhere."""

from maxsimd.api.media.addresses import is_public
from maxsimd.api.media.fetching import MediaFetcher
from maxsimd.api.media.local_files import bytes_of_local_file

__all__ = ["MediaFetcher", "bytes_of_local_file", "is_public"]
