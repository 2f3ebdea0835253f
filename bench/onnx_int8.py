"""sentence-transformers with ONNX Runtime and int8 weights, for an interpreter of its own, without maxsimd:
`onnx_int8.py MODEL THREADS IS_CLASSIFIER` prints the versions, then answers each line of pairs with a line of
scores or embeddings and the processor time that they took, all JSON."""

import importlib.metadata
import json
import os
import sys
import time


def main() -> None:
    model, threads, classifies = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer

    import onnxruntime
    from sentence_transformers import CrossEncoder, SentenceTransformer, export_dynamic_quantized_onnx_model

    kind = CrossEncoder if classifies else SentenceTransformer
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    exported = kind(model, backend="onnx", device="cpu")
    export_dynamic_quantized_onnx_model(exported, "avx512_vnni", model)
    chosen = {"session_options": options, "file_name": "onnx/model_qint8_avx512_vnni.onnx"}
    library = kind(model, backend="onnx", device="cpu", model_kwargs=chosen)
    names = ("onnxruntime", "optimum", "optimum-onnx", "sentence-transformers", "transformers", "torch")
    print(json.dumps({name: _version(name) for name in names}), file=answers, flush=True)
    for line in sys.stdin:
        pairs = json.loads(line)
        started = time.process_time()
        if classifies:
            found = library.predict([tuple(pair) for pair in pairs], show_progress_bar=False)
        else:
            found = library.encode([document for _, document in pairs], show_progress_bar=False)
        print(json.dumps([found.tolist(), time.process_time() - started]), file=answers, flush=True)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
