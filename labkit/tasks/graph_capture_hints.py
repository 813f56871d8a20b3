"""The hints of lesson 5's exercise "capture": of wrong answers by reason, and of errors."""

from labkit.tasks.slips import Slip

HINTS = {
    "no-warm-up": (
        "What does call do at its first call that it never does again?",
        "It compiles its kernels, and that is not allowed while a stream is capturing.",
        "Call it once before the capture: in `with cuda.stream(side):`, with side = cuda.Stream().",
    ),
    "not-in-capture": (
        "While a stream is capturing, nothing runs. Which line in the capture wants to wait for a result?",
        "Waiting, reading a value and replaying belong outside of `with cuda.graph(graph):`.",
        "Inside of it stands one line: y = call(...).",
    ),
    "current-stream": (
        "On which stream is the graph captured, and on which one did call run before?",
        "torch asks for a warm-up on a side stream. With autograd it matters: parts of the backward pass "
        "keep to the stream that they first ran on, and a capture must not reach over to the current one.",
        "side = cuda.Stream(), then call it in `with cuda.stream(side):`.",
    ),
    "no-wait-before": (
        "Two streams know nothing of each other. Who wrote what the side stream reads, and is it finished?",
        "x comes from the current stream, which may still be writing to it.",
        "side.wait_stream(cuda.current_stream()), before the first work on the side stream.",
    ),
    "no-wait-after": (
        "Two streams know nothing of each other. Is the side stream finished when the current one goes on?",
        "Nobody waits for it here. torch.cuda.graph happens to wait for the whole device when it begins, but "
        "what the current stream does otherwise may overtake the side stream.",
        "cuda.current_stream().wait_stream(side), after the work on the side stream.",
    ),
    "empty-graph": (
        "What runs at a replay? Only what was done inside `with cuda.graph(graph):`.",
        "A call before or after it is not in the graph.",
        "The line y = call(...) has to stand in that block.",
    ),
    "stale-input": (
        "A graph remembers addresses, not names. From which memory does it read, and who writes to that?",
        "A new tensor under the old name is somewhere else: the graph goes on reading the old one.",
        "Keep one tensor, static, for the graph to read, and begin replay with static.copy_(new).",
    ),
    "writes-x": (
        "The caller still needs x. Which line writes to it?",
        "The graph reads the tensor that it was captured with, and that one gets overwritten: it can't be x.",
        "static = x.clone(), captured in place of x.",
    ),
    "writes-new": (
        "The caller still needs the tensor `new`. Which line writes to it?",
        "Only the graph's own input is written to.",
        "The direction of a copy: static.copy_(new) reads new and writes static.",
    ),
    "copied-late": (
        "What does the graph's input hold at the moment when the graph is replayed?",
        "The values of the last call, or of the first x: the new ones come after the replay.",
        "In replay: first copy, then replay, then the result.",
    ),
    "copy-captured": (
        "Which lines are inside `with cuda.graph(graph):`? Each of them runs again at every replay.",
        "One of them fills the graph's input from x, and so replaces the new values by old ones.",
        "Make the static tensor before the capture, and copy new into it outside of the graph.",
    ),
    "not-replayed": (
        "Capturing computes nothing. What would compute a result for the new x?",
        "graph.replay() does, and replay has to come to that line.",
        "In replay: static.copy_(new), graph.replay(), and the result.",
    ),
    "replayed-twice": (
        "How many results does the caller want for one new x?",
        "Each graph.replay() does all of the work again.",
        "Copy, then one graph.replay(), then the result.",
    ),
    "captured-anew": (
        "What takes longer, a capture or a replay? Which of the two should happen for each new x?",
        "A capture goes through all of call in Python, and more: it's worth it if many replays follow.",
        "Capture in graphed, once; replay only copies, replays and returns.",
    ),
    "calls-again": (
        "Why a graph at all? What does Python still launch when replay runs?",
        "All that call launches: it was called itself. The graph holds that work already.",
        "In replay, graph.replay() stands in place of call(...).",
    ),
    "early-result": (
        "When is the graph's output filled, and when did you take its values?",
        "Before the replay it still holds the result of the one before, or nothing at all.",
        "graph.replay() first, then y.clone().",
    ),
    "warm-up-result": (
        "call ran more than once. Into which of its results does the graph write?",
        "Into the one from inside the capture. A warm-up's result stays as it is for ever.",
        "In `with cuda.graph(graph):` y = call(static), and this y is what replay makes its result from.",
    ),
    "own-output": (
        "Call replay twice, then look at the first result again. Is it still right?",
        "The graph writes into the same memory at every replay, and you handed out that memory.",
        "Return y.clone().",
    ),
    "one-result": (
        "Call replay twice, then look at the first result again. Where does the second one lie?",
        "All results share one tensor. Each needs memory of its own.",
        "Make the copy anew in each replay: y.clone() does.",
    ),
    "nothing-returned": (
        "What does graphed return, and what does the caller do with it?",
        "The caller calls it with new values of x, many times.",
        "The last line of graphed is return replay: the function, without parentheses.",
    ),
    "not-a-tensor": (
        "What does replay return, on every way through it?",
        "A tensor with the result for the new x.",
        "Its last line: return y.clone().",
    ),
    "wrong-values": (
        "The capture and the replay are as they should be. What else happens to the values?",
        "replay has to return exactly what call would have returned for new, all of it.",
        "static.copy_(new), graph.replay(), return y.clone().",
    ),
    "on-a-gpu": (
        "The pretend device finds it right. What does your code assume that a GPU doesn't keep to?",
        "A GPU works while Python goes on: what waits for what has to be said by streams.",
        "Compare with the solution: which of its lines is missing, or stands elsewhere?",
    ),
}

SLIPS = (
    Slip(
        "another-cuda",
        r"\btorch\.cuda\b|not compiled with CUDA|NVIDIA driver|No CUDA GPUs",
        (
            "The answer is also judged where there is no GPU. By which name does graphed get torch.cuda?",
            "By `cuda`, its first argument: cuda.Stream(), cuda.graph(graph) and so on.",
        ),
    ),
    Slip(
        "unknown-attribute",
        r"'(Cuda|Stream|CUDAGraph|Event)' object has no attribute",
        (
            "Which functions of torch.cuda does a capture by hand need?",
            "cuda has Stream, current_stream, stream, CUDAGraph, graph and synchronize; a stream has "
            "wait_stream and synchronize; a graph has replay and pool.",
        ),
    ),
    Slip(
        "nothing-captured",
        "without a preceding successful capture",
        (
            "What is in the graph when replay runs?",
            "cuda.CUDAGraph() is empty: `with cuda.graph(graph):` fills it with what stands in the block.",
        ),
    ),
    Slip(
        "captured-twice",
        "already owns a captured graph",
        (
            "How often does the capture run on this graph?",
            "A CUDAGraph is captured once. Put the capture outside of loops and of replay.",
        ),
    ),
    Slip(
        "default-stream",
        "on a non-default stream",
        (
            "On which stream does the capture run?",
            "`with cuda.graph(graph):` takes a stream of its own. The current one can't be captured.",
        ),
    ),
    Slip(
        "not-a-context",
        r"context manager protocol|__enter__",
        (
            "`with` takes a context. Which function makes one of a stream, and which of a graph?",
            "`with cuda.stream(side):` and `with cuda.graph(graph):`",
        ),
    ),
    Slip(
        "inference",
        "[Ii]nference",
        (
            "Was the static tensor made in torch.inference_mode()? Outside of it nobody may write to it.",
            "torch.no_grad() will do, or neither: none of the tensors here needs a gradient.",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare what is handed over with the first line of the function, one by one.",
            "call takes x, replay takes new; cuda.stream takes a stream, cuda.graph a graph, wait_stream "
            "the other stream.",
        ),
    ),
)
