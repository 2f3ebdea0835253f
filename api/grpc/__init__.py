"""gRPC with text-embeddings-inference's services (extra: grpc). `tei_pb2` has their messages."""
