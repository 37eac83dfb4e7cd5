"""What the garbage collector looks at while a server serves."""

import subprocess
import sys

# In a process of its own, because the collector of the tests is not to be changed.
LOADED_AND_NEW = """
import gc, weakref
from service.upkeep.garbage import look_at_requests_only

class Circle:
    def __init__(self):
        self.circle = self

circle = Circle()
loaded = weakref.ref(circle)
look_at_requests_only()
new = weakref.ref(Circle())
del circle
gc.collect()
print(loaded() is not None, new() is None, gc.get_threshold()[0] > 700)
"""


def test_collector_looks_at_new_objects_only_and_less_often():
    done = subprocess.run([sys.executable, "-c", LOADED_AND_NEW], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
