"""papermill's client with limits on what a cell leaves in the executed notebook.

Text is cut; figures, pages and widgets beyond the limit are left out, and the cell says so once. What a cell
replaces (a display, a value of a widget's state) or clears no longer counts.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import zmq
from nbformat import NotebookNode
from nbformat.v4 import new_output
from papermill.clientwrap import PapermillNotebookClient

TEXT_LIMIT = 200_000
"""Characters of text that one cell may leave in the executed notebook."""
CUT = "\n[labkit: the rest of this cell's text was left out]\n"
DATA_LIMIT = 5_000_000
"""Characters of figures, pages, widgets and other data, encoded, that one cell may leave there."""
MOST_OUTPUTS = 1000
"""So many displays count as that much, however small they are."""
DATA_CUT = "[labkit: the rest of what this cell shows was left out]"
UPDATE = "update_display_data"
DATA_KINDS = ("display_data", "execute_result", UPDATE)
STATE_KINDS = ("comm_open", "comm_msg")

Name = str | int | tuple[str, ...]


class _Piece(NamedTuple):
    """So many characters in one place, under a name by which a later piece replaces them."""

    place: int | str
    """A cell, or something of a widget."""
    name: Name
    cell: int
    """The cell that they count for."""
    size: int


class _Ledger:
    """Characters that each cell has left: what was replaced or cleared since does not count."""

    def __init__(self, limit: int) -> None:
        self.full: set[int | str] = set()
        """Places that say that something was left out: nothing more is shown there."""
        self._limit = limit
        self._used: Counter[int] = Counter()
        self._kept: dict[int | str, dict[Name, _Piece]] = {}

    def room(self, cell: int) -> int:
        """Characters that a cell may still add."""
        return self._limit - self._used[cell]

    def take(self, pieces: Iterable[_Piece]) -> bool:
        """Count pieces in the place of earlier ones; False, with nothing counted, beyond a cell's limit."""
        listed = list(pieces)
        change: Counter[int] = Counter()
        for piece in listed:
            change[piece.cell] += piece.size
            if before := self._kept.get(piece.place, {}).get(piece.name):
                change[before.cell] -= before.size
        if any(more > max(0, self.room(cell)) for cell, more in change.items()):
            return False
        self._used.update(change)
        for piece in listed:
            self._kept.setdefault(piece.place, {})[piece.name] = piece
        return True

    def longer(self, place: int | str, cell: int, size: int) -> _Piece:
        """What a cell has added to a place, and ``size`` more."""
        before = self._kept.get(place, {}).get(cell)
        return _Piece(place, cell, cell, size + (before.size if before else 0))

    def clear(self, place: int | str) -> None:
        """Nothing of what stood in a place is left."""
        for piece in self._kept.pop(place, {}).values():
            self._used[piece.cell] -= piece.size
        self.full.discard(place)


class LimitedClient(PapermillNotebookClient):
    """papermill's client, with these limits on what a cell leaves behind."""

    clear_before_next_output: bool
    """nbclient's own: a cell has asked for that with ``wait=True``."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._data = _Ledger(DATA_LIMIT)
        self._text = _Ledger(TEXT_LIMIT)
        """Text in Output widgets; a cell's own is cut in its outputs."""

    def process_message(
        self, msg: dict[str, Any], cell: NotebookNode, cell_index: int
    ) -> NotebookNode | None:
        fits = self._fits(msg, cell, cell_index)
        made = super().process_message(msg, cell, cell_index) if fits else None
        # An Output widget's state went back on the shell's socket, and such a send can take the wake-up of a
        # reply that comes meanwhile: the cell would never end. Asking for the events wakes it again.
        self.kc.shell_channel.socket.get(zmq.EVENTS)
        return made

    def clear_output(self, outs: list[NotebookNode], msg: dict[str, Any], cell_index: int) -> None:
        super().clear_output(outs, msg, cell_index)
        for ledger in (self._data, self._text):
            ledger.clear(self._place(msg, cell_index))

    def _place(self, msg: dict[str, Any], cell_index: int) -> int | str:
        """Where a message is shown: the cell, or the Output widget that takes it."""
        hooks = self.output_hook_stack[msg["parent_header"].get("msg_id")]
        return f"outputs of {hooks[-1].comm_id}" if hooks else cell_index

    def _fits(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> bool:
        """Whether a message counts. Of the first one beyond a limit a sentence is left, of later ones none.

        What would replace something, and has no room, becomes a sentence, too, or leaves that as it was.
        """
        kind, content, place = msg["msg_type"], msg["content"], self._place(msg, cell_index)
        if kind in DATA_KINDS:
            return self._data_fits(kind, content, place, cell_index)
        if kind == "stream" and place != cell_index:
            return self._text_fits(content, place, cell_index)
        if kind in STATE_KINDS and "state" in content["data"]:
            return self._state_fits(msg, cell, cell_index)
        return True

    def _data_fits(self, kind: str, content: dict[str, Any], place: int | str, cell_index: int) -> bool:
        if kind != UPDATE and place in self._data.full:
            return False
        if not self._data.take(self._shown(kind, content, place, cell_index)):
            content |= {"data": {"text/plain": DATA_CUT}, "metadata": {}}
            if kind != UPDATE:
                self._data.full.add(place)
        return True

    def _shown(
        self, kind: str, content: dict[str, Any], place: int | str, cell_index: int
    ) -> Iterator[_Piece]:
        """What a display adds, and what it replaces: all that cells show of its display_id."""
        display_id = (content.get("transient") or {}).get("display_id") or ""
        size = _data_size(content["data"], also_text=display_id != "" or place != cell_index)
        standing = self._display_id_map.get(display_id, {})
        times = Counter({cell: len(outputs) for cell, outputs in standing.items()})
        if self.clear_before_next_output and place == cell_index:
            del times[cell_index]  # what stands there goes when this comes
        if kind != UPDATE and display_id and place == cell_index:
            times[cell_index] += 1
        elif kind != UPDATE:
            yield self._data.longer(place, cell_index, size)
        yield from (_Piece(cell, display_id, cell, size * count) for cell, count in times.items())

    def _text_fits(self, content: dict[str, Any], place: int | str, cell_index: int) -> bool:
        if place in self._text.full:
            return False
        text, room = content["text"], self._text.room(cell_index)
        self._text.take([self._text.longer(place, cell_index, min(len(text), room))])
        if len(text) > room:
            content["text"] = text[:room] + CUT
            self._text.full.add(place)
        return True

    def _state_fits(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> bool:
        """A widget without room is left out as a whole; later each value that has none.

        An echo tells a front end's own words to all others: it has been counted as what this one said.
        """
        if msg["content"]["data"].get("method") == "echo_update":
            return True
        pieces = _state_pieces(msg, cell_index)
        if msg["msg_type"] == "comm_open":
            every = (piece for of_key in pieces.values() for piece in of_key)
            if cell_index not in self._data.full and self._data.take(every):
                return True
            self._say_cut(cell, cell_index)
            return False
        if msg["content"]["comm_id"] not in self.widget_state:
            return False
        # without its msg_id an Output widget would not know the messages that are its own
        over = {key for key, given in pieces.items() if not self._data.take(given) and key != "msg_id"}
        if over:
            _leave_out(msg, over)
            self._say_cut(cell, cell_index)
        return True

    def _say_cut(self, cell: NotebookNode, cell_index: int) -> None:
        if cell_index not in self._data.full:
            if self.clear_before_next_output:  # else the next output would clear the sentence away
                cell.outputs.clear()
                self.clear_display_id_mapping(cell_index)
                self.clear_before_next_output = False
            cell.outputs.append(new_output("display_data", data={"text/plain": DATA_CUT}))
            self._data.full.add(cell_index)

    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        made = super().output(outs, msg, display_id, cell_index)
        if made is not None:
            _join_streams(outs)
            _limit_text(outs, droppable=display_id is None)
        return made


def _join_streams(outputs: list[NotebookNode]) -> None:
    """Append a piece of a stream to its earlier piece, unless something else was shown in between.

    How a kernel cuts its text into pieces is chance, and a recorded output has to be the same every time.
    """
    last = outputs[-1]
    for before in reversed(outputs[:-1]):
        if last.output_type != "stream" or before.output_type != "stream":
            return
        if before.name == last.name:
            before.text += last.text
            outputs.pop()
            return


def _data_size(data: Mapping[str, Any], *, also_text: bool) -> int:
    """Characters of a message's data; many small ones are a flood, too."""
    shown = (value for mime, value in data.items() if also_text or mime != "text/plain")
    sizes = [len(value) if isinstance(value, str) else len(json.dumps(value)) for value in shown]
    return max(sum(sizes), DATA_LIMIT // MOST_OUTPUTS) if sizes else 0


def _state_pieces(msg: dict[str, Any], cell: int) -> dict[str, list[_Piece]]:
    """What a message says of a widget's state, by key: values, and buffers as they are kept, in base64."""
    comm_id, data = msg["content"]["comm_id"], msg["content"]["data"]
    found = {
        key: [_Piece(comm_id, key, cell, len(key) + len(json.dumps(value)))]
        for key, value in data["state"].items()
    }
    for path, buffer in zip(data.get("buffer_paths") or [], msg["buffers"], strict=False):
        size = memoryview(buffer).nbytes * 4 // 3
        found.setdefault(path[0], []).append(_Piece(comm_id, tuple(map(str, path)), cell, size))
    return found


def _leave_out(msg: dict[str, Any], keys: set[str]) -> None:
    """Take keys of a widget's state out of a message, with their buffers."""
    data = msg["content"]["data"]
    data["state"] = {key: value for key, value in data["state"].items() if key not in keys}
    paths = data.get("buffer_paths") or []
    kept = [pair for pair in zip(paths, msg["buffers"], strict=False) if pair[0][0] not in keys]
    data["buffer_paths"], msg["buffers"] = [path for path, _ in kept], [buffer for _, buffer in kept]


def _text_length(output: NotebookNode) -> int:
    if output.output_type == "stream":
        return len(output.text)
    if output.output_type == "error":
        return sum(map(len, output.traceback))
    return len(output.data.get("text/plain", ""))


def _limit_text(outputs: list[NotebookNode], droppable: bool) -> None:
    """Cut the last output of a cell to the room that the outputs before it leave."""
    last = outputs[-1]
    room = TEXT_LIMIT - sum(map(_text_length, outputs[:-1]))
    if _text_length(last) <= room:
        return
    if last.output_type == "error":  # the error itself is always told, by its end
        last.evalue = last.evalue[:2000]
        last.traceback = ["\n".join(last.traceback)[-20_000:]]
    elif room < 0 and droppable and (last.output_type == "stream" or set(last.data) == {"text/plain"}):
        outputs.pop()  # a negative room means that a cut has been noted before
    elif last.output_type == "stream":
        last.text = last.text[:room] + CUT
    else:
        last.data["text/plain"] = last.data["text/plain"][: max(0, room)] + CUT
