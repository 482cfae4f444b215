from fedquilt.axes import *  # noqa
from fedquilt.axes import Run  # noqa
