//! Another language's client, made from the .proto files alone.

use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::python::Python;

#[test]
fn stock_grpcio_loads_and_generates() {
    let modules = ["grpc", "grpc_tools", "grpc_health", "grpc_reflection"];
    let Some(python) = Python::find("stock_grpcio_loads_and_generates", &modules) else {
        return;
    };
    let daemon = Daemon::start(&Options::default());
    let (socket, model) = (daemon.socket(), fixtures::path(TINY_LLAMA));
    let exam = fixtures::exam();
    let arguments = [
        "--socket".as_ref(),
        socket.as_os_str(),
        "--model".as_ref(),
        model.as_os_str(),
        "--message".as_ref(),
        exam[0].prompt.as_ref(),
    ];
    let answer = python.run("grpc_client.py", &arguments);
    assert_eq!(answer.trim(), exam[0].answer);
    daemon.stop();
}
