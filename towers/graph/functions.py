"""What ops and functions of a graph compute, apart from the names that TensorFlow makes up for them."""
import hashlib

__all__ = ["MADE_UP", "Functions"]

# Attributes that hold names and numbers that TensorFlow makes up, for each op others.
# A call's "config_proto" has the devices in an order that is each thread's own.
MADE_UP = frozenset(["shared_name", "container", "seed", "seed2", "token", "frame_name", "tensor_array_name", "source",
                     "stack_name", "message", "config_proto"])


class Functions:
    """The functions of a graph by what they compute: those of branches and loops are made anew for each tower."""

    def __init__(self, graph):
        self._graph, self._library, self._fingerprints = graph, None, {}

    def attributes(self, node):
        """Returns what an op's attributes say of what it computes, a hashable."""
        return tuple((key, self._fingerprint_of_value(node.attr[key])) for key in sorted(node.attr)
                     if key not in MADE_UP and not key.startswith("_"))

    def has(self, name):
        """Tells whether there is a function of a name, which an op that calls it may have for its type."""
        if self._library is None:
            self._library = {f.signature.name: f for f in self._graph.as_graph_def().library.function}
        return name in self._library

    def fingerprint(self, name):
        """Returns bytes that are the same for functions that compute the same, op by op."""
        if name not in self._fingerprints:
            self._fingerprints[name] = name.encode()  # of one that calls itself, and one that is not there
            if self.has(name):
                self._fingerprints[name] = self._fingerprint_of_body(self._library[name])
        return self._fingerprints[name]

    def _fingerprint_of_value(self, value):
        functions = [value.func] if value.HasField("func") else value.list.func
        if len(functions):
            return tuple(self.fingerprint(function.name) for function in functions)
        return value.SerializeToString()

    def _fingerprint_of_body(self, function):
        numbers = {node.name: number for number, node in enumerate(function.node_def)}
        numbers.update((argument.name, -number) for number, argument in enumerate(function.signature.input_arg, 1))

        def plain(name):
            source, colon, output = name.lstrip("^").partition(":")
            return name[:1] == "^", numbers.get(source, source), colon and output

        body = [(self.fingerprint(node.op), tuple(map(plain, node.input)), self.attributes(node)) for node in function.node_def]
        outputs = [plain(function.ret[argument.name]) for argument in function.signature.output_arg]
        return hashlib.sha256(repr((body, outputs)).encode()).digest()
