"""A federation of real devices.

terms.py       method, link and task as the settings of a request
device.py      a device: it answers requests with its own samples and its own state
device_evaluation.py  a device evaluates nets on its own samples, and sends sums
own_net.py     a device's own net, exported from its state folder
states.py      versions of a device's state on its disk
in_process.py  devices in one process, reached by bytes, with faults on demand

Over Flower, with the extra `flower`:

keys.py        a CA, a server certificate and device keys
roster.py      which device is which client
gate.py        lets devices through to a SuperLink, and nothing else
envelope.py    messages as records of Flower
enrolment.py   first contact: a server describes its model, and a device introduces itself
grid.py        the courier over Flower's grid
server.py      the server's side: the run in a folder, trained by a ServerApp
host.py        the device's side: settings of its owner, and replies to messages
worker.py      the long-lived worker of a device; all internals of flwr are here
app.py         Flower's ServerApp and ClientApp; flower_app/ is the folder that is submitted
flower.py      ServerApp and ClientApp for apps of Flower users
simulated.py   nodes of Flower's simulation, which have no keys
processes.py   processes of Flower: started, watched, stopped
superlink.py   a SuperLink on loopback and its SuperExec
supernode.py   a SuperNode and its worker
serving.py     `fedquilt serve`
joining.py     `fedquilt join`
"""
